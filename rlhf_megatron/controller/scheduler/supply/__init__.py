"""Where the loop gets a step's scored samples from: made in the step itself, or in the background
of other steps.
"""

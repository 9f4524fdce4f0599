"""What a user starts: training, generation, serving, and configurations of verl."""

"""One process stands for any rank of any world on the null library: its peers answer nothing, and
kernels do nothing. What is seen: the checks of each operator, exact bytes of torch's allocator,
kernel launches, waits for the device.
"""

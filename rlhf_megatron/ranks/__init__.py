"""What a rank runs: the parallel world, kernels, models, workers and sharded checkpoints."""

"""A valid run for the tests of configuration rules: two replicas of tp2 pp2."""

VALID = """
model: {path: model, dtype: float32}
data: {task: addition, train_batch_size: 32, max_prompt_length: 6, max_response_length: 4}
actor:
  megatron: {tensor_model_parallel_size: 2, pipeline_model_parallel_size: 2}
  mini_batch_size: 128
rollout: {engine: local, n: 16}
trainer: {n_gpus_per_node: 8, total_training_steps: 20}
"""

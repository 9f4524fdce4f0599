"""What a run would do with its time: discrete events over the schedules of a real run. No module here imports torch."""

"""The weight table and what reads, cuts, packs and converts weights: torch, and no megatron."""

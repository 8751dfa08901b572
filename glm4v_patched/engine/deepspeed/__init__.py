"""ZeRO: its configuration, and what is replaced inside of DeepSpeed."""

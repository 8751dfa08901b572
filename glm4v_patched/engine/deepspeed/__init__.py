"""DeepSpeed ZeRO: its configuration, and the parts of DeepSpeed that are replaced."""

"""Answer data files, evaluate, chat, serve, export, and merge LoRA adapters."""

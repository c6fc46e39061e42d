"""Hugging Face checkpoints in and out: configuration, tensor names, safetensors, chat templates."""

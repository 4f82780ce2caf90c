"""Adapters as PEFT lays them down: a directory with adapter_config.json and adapter_model.safetensors."""

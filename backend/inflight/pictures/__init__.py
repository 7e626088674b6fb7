"""Pictures in prompts: transformers' vision towers in a process of their own, and its clients."""

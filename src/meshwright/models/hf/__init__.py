"""Hugging Face configs: as models, and what samples of them look like."""

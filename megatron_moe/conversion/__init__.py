"""The outside world: checkpoints of Hugging Face's folders and of this framework, one two-way table between them."""

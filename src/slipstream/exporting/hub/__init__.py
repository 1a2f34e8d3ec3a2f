"""A folder in the layout of the Hugging Face Hub."""

"""Prepare: a draft config for a data file, with its steps and its split tried on the rows."""

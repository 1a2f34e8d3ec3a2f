"""Searches in the app: the editor of their space, and their trials as files. Imports no Optuna."""

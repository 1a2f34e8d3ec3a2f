"""The screens: one module each, with the functions of its routes."""

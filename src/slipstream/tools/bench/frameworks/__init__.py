"""The same job in other frameworks' loops."""

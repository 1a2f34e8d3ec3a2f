"""The web app of `slipstream ui`: one folder in the browser. Nothing here imports torch.

A screen is a module in `screens/`, a template, an ES module in `static/`, and lines in the table of
routes (`app.py`). The folder is the database: runs are read as the command line wrote them, and
what the app starts is a config file and a command, run by a worker process (`jobs/`).
"""

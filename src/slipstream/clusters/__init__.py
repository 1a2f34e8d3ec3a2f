"""Workers as tasks of a Ray cluster: what each gets, where its folder is, how they are watched."""

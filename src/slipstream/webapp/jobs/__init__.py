"""Jobs: commands that wait in a queue for each device and run in processes of their own."""

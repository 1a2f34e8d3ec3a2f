"""What `import slipstream` offers: progress, typed events and results around the commands' code.

The functions here take more kinds of arguments than the code below them, show progress, and give
back objects made for a notebook. None of these modules imports torch before it is needed.
"""

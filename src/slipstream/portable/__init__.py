"""A trained model without torch: read from its run, fed with rows, computed with numpy."""

"""What-if: sliders train a small model and show its error within seconds."""

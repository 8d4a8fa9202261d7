"""Small reference models, written plainly, and how any model is named, built and called."""

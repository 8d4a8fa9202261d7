"""What a user's own training loop meets: `wrap` spreads the model, the loop stays as it was."""

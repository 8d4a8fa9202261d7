"""Where a row of units is cut into pipeline stages."""

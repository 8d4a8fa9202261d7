"""What a request that no plan fits is told: which changes would make one fit."""

"""Other people's formats: DeepSpeed and Accelerate configurations, tables of published runs. No torch."""

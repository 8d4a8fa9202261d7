"""What the cost model and the runtime must agree on: ZeRO groups, buckets, shardings, stages, schedules. No torch."""

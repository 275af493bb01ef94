"""To measure and to predict: an emulated cluster, benchmarks, profiles, the adviser."""

"""To measure and to look: an emulated cluster, benchmarks, timelines, reports."""

"""Who holds the global weights: servers, every worker, or each worker a part."""

"""Expert parallelism's load balance: which rank holds which experts, and how often, follows what tokens ask for."""

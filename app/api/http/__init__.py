"""HTTP itself: keys, bodies, errors, middleware, the work of a request. No dialect, no engine."""

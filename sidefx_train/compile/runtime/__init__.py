"""What the user calls: dispatch to cache entries, recapture, eager fallback, background compilation."""

"""Tools beside training: inspect, doctor, profile, bench."""

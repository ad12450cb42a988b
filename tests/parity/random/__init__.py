"""Random numbers and generators (`capture/recording`)."""

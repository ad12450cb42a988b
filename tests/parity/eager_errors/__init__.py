"""What eager refuses, a captured step refuses (`capture/recording/eager_parity`)."""

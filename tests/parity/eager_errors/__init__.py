"""Operations that eager refuses are refused in a captured step (`capture/recording/eager_parity`)."""

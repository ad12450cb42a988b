"""Where values come from (sources), what must hold for a replay (guards), and the code that checks it."""

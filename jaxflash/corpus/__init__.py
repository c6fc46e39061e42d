"""Text on its way to tokens: `documents` reads it, `tokens` keeps it as a memory map; a small corpus ships here."""

"""What commands print: lines, tables, JSON."""

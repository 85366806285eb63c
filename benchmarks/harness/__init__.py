"""What every case uses: timing and memory, the rows that are kept, pages and pictures made from them."""

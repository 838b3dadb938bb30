"""What watches a run while it trains: its memory beside the prediction, its pace, advice when memory runs out."""

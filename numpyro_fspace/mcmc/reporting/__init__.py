"""What a run says of itself: the report, its advice, its picture, the summary and the warnings at the end."""

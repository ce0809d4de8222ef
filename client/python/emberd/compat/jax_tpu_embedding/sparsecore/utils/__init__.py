"""What examples use."""

"""Write files and directories whole or not at all, and check their contents."""

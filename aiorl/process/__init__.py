"""Worker processes of one host: started, watched, restarted, ended."""

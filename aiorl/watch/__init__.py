"""`aiorl watch`: a read-only page of runs, made from their directories alone.

`reading` reads the files of runs and makes the account that people look at, `app` answers browsers
and probes, and `page/` is what a browser shows. The directories can be of runs that train, have
ended, or were copied here; nothing in their files is trusted.
"""

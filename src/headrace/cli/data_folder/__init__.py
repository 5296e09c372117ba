"""Commands that read or repair the files of a data folder, with or without a running broker.

`headrace log` and `headrace standby` live here. They use headrace.log directly; its locks keep them away from files
that a broker is writing.
"""

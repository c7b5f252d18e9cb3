# exiftool's configuration while vlfit runs it, in place of a person's own, which could change what is written.
# With -stay_open exiftool waits for commands for ever, also when nobody can send one any more. So it looks
# every few seconds whether the process that started it is there.
my $vlfit = $ENV{VLFIT_PROCESS};
$SIG{ALRM} = sub { getppid() == $vlfit or exit 1; alarm 2 };
alarm 2;
1;

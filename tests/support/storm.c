/* Fork storms for the keeper's tests. KIND is "bomb" (each process forks endlessly), "mortal" (each process starts two
 * children and exits) or "comet" (each process starts one child and exits). With "-session" each process leads its own
 * session, and with "-ignore" the kernel reaps the children. Run this in a pid namespace with a process limit. */
#include <signal.h>
#include <string.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    const char *kind = argc > 1 ? argv[1] : "";
    int most = strstr(kind, "comet") ? 1 : strstr(kind, "mortal") ? 2 : 0, made = 0;
    if (strstr(kind, "ignore"))
        signal(SIGCHLD, SIG_IGN);
    for (;;) {
        pid_t pid = fork();
        made = pid == 0 ? 0 : pid > 0 ? made + 1 : made;
        if (pid == 0 && strstr(kind, "session"))
            setsid();
        if (most && made >= most)
            return 0;
    }
}

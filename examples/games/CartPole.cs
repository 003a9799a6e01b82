// CartPole that a policy plays, as a program for the terminal. With Mono, on Debian the packages mono-mcs and
// libnewtonsoft-json5.0-cil:
//
//     mcs -lib:/usr/lib/cli/Newtonsoft.Json-5.0 -r:Newtonsoft.Json.dll -out:CartPole.exe examples/games/CartPole.cs examples/games/PolicyClient.cs
//     mono CartPole.exe ws://localhost:8000 10
//
// It plays 10 games, two at a time, and prints the steps of each. At ws://localhost:9900, a run of
// examples/external_http.yaml learns from them.

using System;
using System.IO;
using System.Linq;
using System.Net.WebSockets;
using System.Threading;
using System.Threading.Tasks;
using Aiorl;

public static class CartPole
{
    private const int Together = 2;
    private static int games;

    public static int Main(string[] words)
    {
        if (words.Length != 2)
        {
            Console.Error.WriteLine("Give the address of a server and a number of games: ws://localhost:8000 10");
            return 2;
        }
        try
        {
            PlayAllAsync(words[0], int.Parse(words[1])).GetAwaiter().GetResult();
            return 0;
        }
        catch (Exception error) when (error is RequestRefused || error is WebSocketException || error is IOException)
        {
            Console.Error.WriteLine(error.Message);
            return 1;
        }
    }

    private static async Task PlayAllAsync(string url, int count)
    {
        using (var client = await PolicyClient.ConnectAsync(url))
        {
            await Task.WhenAll(Enumerable.Range(0, Together).Select(seed => PlayAsync(client, count, seed)));
        }
    }

    private static async Task PlayAsync(PolicyClient client, int count, int seed)
    {
        var random = new Random(seed);
        var session = await client.OpenAsync();
        while (Interlocked.Increment(ref games) <= count)
        {
            var state = Enumerable.Range(0, 4).Select(_ => random.NextDouble() * 0.1 - 0.05).ToArray();
            var steps = 0;
            var reward = 0.0;
            var isOver = false;
            while (!isOver && steps < 500)
            {
                var action = (int)await session.ActAsync(state, reward);
                Step(state, action);
                steps += 1;
                reward = 1.0;
                isOver = Math.Abs(state[0]) > 2.4 || Math.Abs(state[2]) > 12 * Math.PI / 180;
            }
            await session.EndAsync(state, reward, truncated: !isOver);
            Console.WriteLine(steps);
        }
        await session.CloseAsync();
    }

    // The equations of Barto, Sutton and Anderson 1983, as Gymnasium has them.
    private static void Step(double[] state, int action)
    {
        var force = action == 1 ? 10.0 : -10.0;
        var cosine = Math.Cos(state[2]);
        var sine = Math.Sin(state[2]);
        var push = (force + 0.05 * state[3] * state[3] * sine) / 1.1;
        var turn = (9.8 * sine - cosine * push) / (0.5 * (4.0 / 3.0 - 0.1 * cosine * cosine / 1.1));
        var pull = push - 0.05 * turn * cosine / 1.1;
        state[0] += 0.02 * state[1];
        state[1] += 0.02 * pull;
        state[2] += 0.02 * state[3];
        state[3] += 0.02 * turn;
    }
}

// Client of `aiorl serve`, and of runs that learn from games, over one WebSocket: for Unity, Godot with .NET and other
// .NET programs. It needs the package Newtonsoft.Json; in Unity, that is com.unity.nuget.newtonsoft-json.

using System;
using System.Collections.Concurrent;
using System.IO;
using System.Net.WebSockets;
using System.Text;
using System.Threading;
using System.Threading.Tasks;
using Newtonsoft.Json;
using Newtonsoft.Json.Linq;

namespace Aiorl
{
    // A request that the server refused; the status is that of HTTP.
    public sealed class RequestRefused : Exception
    {
        public readonly int Status;

        public RequestRefused(int status, string sentence) : base(sentence)
        {
            Status = status;
        }
    }

    // Many games can share a client: their requests are under way at the same time.
    public sealed class PolicyClient : IDisposable
    {
        private const int Busy = 503;
        private readonly ClientWebSocket socket = new ClientWebSocket();
        private readonly SemaphoreSlim sending = new SemaphoreSlim(1);
        private readonly CancellationTokenSource closing = new CancellationTokenSource();
        private readonly ConcurrentDictionary<int, TaskCompletionSource<JObject>> waiting =
            new ConcurrentDictionary<int, TaskCompletionSource<JObject>>();
        private volatile Exception end;
        private int lastId;

        private PolicyClient() { }

        // Connect to a URL such as ws://localhost:8000. A server for other users or hosts asks for a token.
        public static async Task<PolicyClient> ConnectAsync(string url, string token = null)
        {
            var client = new PolicyClient();
            if (token != null) client.socket.Options.SetRequestHeader("Authorization", "Bearer " + token);
            await client.socket.ConnectAsync(new Uri(url + "/ws"), CancellationToken.None);
            _ = Task.Run(client.ReceiveAsync);
            return client;
        }

        // Open a session, which one game plays in. A run that isn't ready yet is asked again for up to five minutes.
        public async Task<Session> OpenAsync(bool train = true)
        {
            var until = DateTime.UtcNow.AddMinutes(5);
            while (true)
            {
                try
                {
                    var answer = await AskAsync("open", new JObject { ["train"] = train });
                    return new Session(this, (string)answer["session"]);
                }
                catch (RequestRefused refused) when (refused.Status == Busy && DateTime.UtcNow < until)
                {
                    await Task.Delay(1000);
                }
            }
        }

        // Send a request, and return its answer.
        public async Task<JObject> AskAsync(string what, JObject keys)
        {
            var id = Interlocked.Increment(ref lastId);
            keys["id"] = id;
            keys["do"] = what;
            var answered = new TaskCompletionSource<JObject>(TaskCreationOptions.RunContinuationsAsynchronously);
            waiting[id] = answered;
            if (end != null) Fail();
            var message = new ArraySegment<byte>(Encoding.UTF8.GetBytes(keys.ToString(Formatting.None)));
            await sending.WaitAsync();
            try
            {
                if (end == null) await socket.SendAsync(message, WebSocketMessageType.Text, true, closing.Token);
            }
            finally
            {
                sending.Release();
            }
            var answer = await answered.Task;
            if (answer["error"] != null) throw new RequestRefused((int)answer["status"], (string)answer["error"]);
            return answer;
        }

        public void Dispose()
        {
            closing.Cancel();
            socket.Dispose();
        }

        private async Task ReceiveAsync()
        {
            var buffer = new ArraySegment<byte>(new byte[65536]);
            try
            {
                while (true)
                {
                    var message = new MemoryStream();
                    WebSocketReceiveResult part;
                    do
                    {
                        part = await socket.ReceiveAsync(buffer, closing.Token);
                        message.Write(buffer.Array, 0, part.Count);
                    } while (!part.EndOfMessage);
                    if (part.MessageType == WebSocketMessageType.Close) throw new IOException("the server is gone");
                    var answer = JObject.Parse(Encoding.UTF8.GetString(message.ToArray()));
                    TaskCompletionSource<JObject> answered;
                    if (waiting.TryRemove((int)answer["id"], out answered)) answered.SetResult(answer);
                }
            }
            catch (Exception error)
            {
                end = error;
                Fail();
            }
        }

        private void Fail()
        {
            foreach (var id in waiting.Keys)
            {
                TaskCompletionSource<JObject> answered;
                if (waiting.TryRemove(id, out answered)) answered.SetException(new IOException("the server is gone", end));
            }
        }
    }

    // A game of one player. Observations are numbers, arrays, and objects of them, as the spaces of the policy say.
    public sealed class Session
    {
        private readonly PolicyClient client;
        private readonly string id;

        internal Session(PolicyClient client, string id)
        {
            this.client = client;
            this.id = id;
        }

        // Return the action for an observation. The reward is that since the last request.
        public async Task<JToken> ActAsync(object observation, double reward = 0)
        {
            return (await client.AskAsync("act", Keys(observation, reward)))["action"];
        }

        // End the episode; it is truncated if it could have gone on. The next act begins another one.
        public Task EndAsync(object observation, double reward = 0, bool truncated = false)
        {
            var keys = Keys(observation, reward);
            keys["truncated"] = truncated;
            return client.AskAsync("end", keys);
        }

        public Task CloseAsync()
        {
            return client.AskAsync("close", new JObject { ["session"] = id });
        }

        private JObject Keys(object observation, double reward)
        {
            return new JObject
            {
                ["session"] = id,
                ["observation"] = JToken.FromObject(observation),
                ["reward"] = reward,
            };
        }
    }
}
